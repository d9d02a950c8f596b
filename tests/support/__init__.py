"""Oracles, random cases and readers that tests of several folders share."""
