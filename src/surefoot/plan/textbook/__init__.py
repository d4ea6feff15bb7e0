"""Rules of thumb, each computed again, where a plan has the figure by the functions that plans use."""
