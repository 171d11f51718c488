"""Training on one named version of a preference dataset; one script a method."""
