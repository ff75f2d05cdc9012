"""Object stores, and the commit protocol on top of them."""
