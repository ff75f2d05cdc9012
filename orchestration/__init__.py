"""What runs when: applications, their plan and step, and how Dagster runs them."""
