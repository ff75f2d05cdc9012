"""When records happened, and what operators over time share: records that came late, records made of several."""
