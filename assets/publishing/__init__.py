"""How a version becomes what readers get: built, judged, sealed, switched; and moved by operators."""
