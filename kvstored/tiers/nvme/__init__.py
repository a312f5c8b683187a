"""NVMe tier: slots in a preallocated file, LMDB index."""
