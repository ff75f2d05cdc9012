"""The Table API: records by key in other stores, with partial updates (SAMZA-2709)."""
