"""A model is data and three functions: config, weights described once, forward."""
