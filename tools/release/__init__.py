"""What a release is built with and must pass: ``make release-check``."""
