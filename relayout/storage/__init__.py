"""Where files are: the store protocols, and the stores that implement them."""
