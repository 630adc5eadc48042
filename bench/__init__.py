"""What is measured: one script a section, one adapter a library."""
