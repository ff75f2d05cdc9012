"""What a run of the step has open, its engine, dataset versions and leases, and how far it has come."""
