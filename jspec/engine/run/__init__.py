"""The loop: plans of the scheduler to the device, results to requests, recovery, statistics."""
