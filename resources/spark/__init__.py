"""The Spark session, its settings, and errors as Spark tells them."""
