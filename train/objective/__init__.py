"""What training minimises and reports: pure functions, no collective, no I/O."""
