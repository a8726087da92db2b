"""Classifiers that probes are: of scikit-learn and torch, linear or with one hidden layer."""
