"""Figures of runs, comparisons with plain decoding, measurements, and checks of compiled programs."""
