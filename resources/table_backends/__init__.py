"""Table functions for real stores. A store's driver is imported when a connection is opened."""
