"""Four problems of different kinds, each with a rule written by hand as the thing to beat."""
