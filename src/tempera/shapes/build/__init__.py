"""How the networks of the shipped model are trained."""
