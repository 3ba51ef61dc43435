"""Which positions of the sequence each rank of the ring holds."""
