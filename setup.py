"""Lets tools that look for a setup.py build the package; pyproject.toml describes it."""

from setuptools import setup

setup()
