"""Memory of one device, term by term."""
