"""Rules of thumb, each computed again by the functions that plans use."""
