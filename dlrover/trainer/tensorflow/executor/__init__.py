"""Trains a conf class."""
