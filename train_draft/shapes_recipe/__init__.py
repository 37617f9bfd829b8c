"""How the shipped model was made: its networks' trainings, from seeds, stage by stage."""
