"""The one seam for files, with fault injection."""
