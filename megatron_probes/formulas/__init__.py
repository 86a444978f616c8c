"""Pure functions of reduced sums, counts, histograms and windows, one file a metric family."""
