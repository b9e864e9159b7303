"""kubelet's device plugin for seats: a resource for each profile, a device for each seat."""
