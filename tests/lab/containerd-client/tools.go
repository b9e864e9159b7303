//go:build tools

// What go.mod pins: containerd's client tests, whose program is built with `go test -c`.
package tools

import _ "github.com/containerd/containerd/v2/integration/client"
