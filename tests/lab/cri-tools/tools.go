//go:build tools

// What go.mod pins beside crictl: CRI's validation suite, whose program is built with `go test -c`.
package tools

import (
	_ "sigs.k8s.io/cri-tools/pkg/benchmark"
	_ "sigs.k8s.io/cri-tools/pkg/validate"
)
