"""Tests of pods under a real kubelet, by kubectl as its user types it, in a lane of the lab that has a cluster."""
