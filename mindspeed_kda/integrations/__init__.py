"""Trainers that pick this package up. Each module is imported by its user and touches nothing until it is told to."""
