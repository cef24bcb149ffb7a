"""Calibration runs on the engine."""
