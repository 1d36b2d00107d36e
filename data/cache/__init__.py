"""The cache of target states: a Zarr v3 store, its writer, its reader and its checks."""
