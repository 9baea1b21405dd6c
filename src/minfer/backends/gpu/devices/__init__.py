"""Devices that run launches: one small contract (`base.py`), one file a device."""
