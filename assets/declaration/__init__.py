"""What users say of a dataset. Pure declarations: making one reads nothing and writes nothing."""
