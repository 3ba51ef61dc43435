"""Put defects into a copy of the package and count how many the tests catch."""
