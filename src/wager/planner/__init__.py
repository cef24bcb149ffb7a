"""How long a step takes by its roofline: published models on published devices."""
