"""Mixed collectives between processes for as long as one likes, all results checked."""
