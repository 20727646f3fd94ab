"""What `agentinfer bench` measures, and beside which facts it is reported."""
