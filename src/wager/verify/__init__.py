"""Verification: the processed distribution of a row, the rules that judge guesses, the packing of a step's rows."""
