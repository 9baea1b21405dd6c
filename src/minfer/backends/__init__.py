"""Devices that run graphs."""
