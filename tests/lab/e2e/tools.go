//go:build tools

// What go.mod pins: Kubernetes' end-to-end tests, whose program is built with `go test -c`.
package tools

import _ "k8s.io/kubernetes/test/e2e"
