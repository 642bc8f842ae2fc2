"""Scripts to be read and run, from the root of the repository."""
