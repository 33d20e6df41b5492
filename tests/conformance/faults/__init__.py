"""Engines that are wrong in one respect at a time, and what a check says of them."""
