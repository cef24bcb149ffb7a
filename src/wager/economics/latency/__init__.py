"""How long a step takes on this machine: measured, fitted, and corrected by every step."""
