"""What a step takes on paper: a roofline of published models on published devices."""
