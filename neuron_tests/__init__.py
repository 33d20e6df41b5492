"""The hardware suite for AWS Neuron devices: ``pytest -m neuron --pyargs neuron_tests`` on inf2 or trn1."""
