"""Layers whose parameters are split over devices, gathered as they are needed."""
