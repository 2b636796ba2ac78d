"""Fitting a bank and its thresholds: a trace of ranks and entropies, tree growth, replay, choice of edges."""
