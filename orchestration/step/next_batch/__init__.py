"""The batch that comes next: what it is planned over, what it reads, and the dataset versions that it meets, leased."""
