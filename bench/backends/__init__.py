"""One small adapter a library, all equal in shape; libraries are imported inside functions."""
