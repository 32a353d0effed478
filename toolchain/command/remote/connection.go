// Package remote runs commands and copies files over SSH.
package remote

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	p "github.com/pulumi/pulumi-go-provider"
	"github.com/pulumi/pulumi-go-provider/infer"
	"github.com/pulumi/pulumi/sdk/v3/go/common/util/retry"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

const (
	defaultUser              = "root"
	defaultPort              = 22
	defaultDialErrorLimit    = 10
	defaultPerDialTimeoutSec = 15
	unlimited                = -1
)

// Endpoint is one SSH server and the way to log in there.
type Endpoint struct {
	User               *string  `pulumi:"user,optional"`
	Password           *string  `pulumi:"password,optional"           provider:"secret"`
	Host               *string  `pulumi:"host"`
	Port               *float64 `pulumi:"port,optional"`
	PrivateKey         *string  `pulumi:"privateKey,optional"         provider:"secret"`
	PrivateKeyPassword *string  `pulumi:"privateKeyPassword,optional" provider:"secret"`
	AgentSocketPath    *string  `pulumi:"agentSocketPath,optional"`
	DialErrorLimit     *int     `pulumi:"dialErrorLimit,optional"`
	PerDialTimeout     *int     `pulumi:"perDialTimeout,optional"`
	HostKey            *string  `pulumi:"hostKey,optional"`
}

func (e *Endpoint) setDefaults(a infer.Annotator) {
	a.SetDefault(&e.User, defaultUser)
	a.SetDefault(&e.Port, defaultPort)
	a.SetDefault(&e.DialErrorLimit, defaultDialErrorLimit)
	a.SetDefault(&e.PerDialTimeout, defaultPerDialTimeoutSec)
}

// Connection is an Endpoint, perhaps behind another.
type Connection struct {
	Endpoint
	Proxy *Proxy `pulumi:"proxy,optional"`
}

// Proxy is the Endpoint through which a Connection is made.
type Proxy struct{ Endpoint }

// Annotate sets the defaults.
func (c *Connection) Annotate(a infer.Annotator) { c.setDefaults(a) }

// Annotate sets the defaults.
func (x *Proxy) Annotate(a infer.Annotator) { x.setDefaults(a) }

func (e *Endpoint) address() string {
	return net.JoinHostPort(*e.Host, strconv.Itoa(int(*e.Port)))
}

func (e *Endpoint) errorLimit() int {
	if e.DialErrorLimit == nil {
		return defaultDialErrorLimit
	}
	return *e.DialErrorLimit
}

// clientConfig turns the inputs into SSH terms. Without a host key any is
// accepted, as the released plugin does; whoever cares sets one.
func (e *Endpoint) clientConfig() (*ssh.ClientConfig, error) {
	config := &ssh.ClientConfig{
		User:            *e.User,
		Timeout:         time.Duration(*e.PerDialTimeout) * time.Second,
		HostKeyCallback: ssh.InsecureIgnoreHostKey(),
	}
	if e.HostKey != nil {
		key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(*e.HostKey))
		if err != nil {
			return nil, fmt.Errorf("failed to parse host key: %w", err)
		}
		config.HostKeyCallback = ssh.FixedHostKey(key)
		config.HostKeyAlgorithms = []string{key.Type()}
	}
	if e.PrivateKey != nil {
		signer, err := e.signer()
		if err != nil {
			return nil, err
		}
		config.Auth = append(config.Auth, ssh.PublicKeys(signer))
	}
	if e.Password != nil {
		password := *e.Password
		answer := func(_, _ string, questions []string, _ []bool) ([]string, error) {
			answers := make([]string, len(questions))
			for i := range answers {
				answers[i] = password
			}
			return answers, nil
		}
		config.Auth = append(config.Auth, ssh.Password(password), ssh.KeyboardInteractive(answer))
	}
	socket := os.Getenv("SSH_AUTH_SOCK")
	if e.AgentSocketPath != nil {
		socket = *e.AgentSocketPath
	}
	if socket != "" || e.AgentSocketPath != nil {
		// An agent that is named but not there is an error even when a key is
		// given too: the released plugin refuses it.
		connection, err := net.Dial("unix", socket)
		if err != nil {
			return nil, err
		}
		config.Auth = append(config.Auth, ssh.PublicKeysCallback(agent.NewClient(connection).Signers))
	}
	return config, nil
}

func (e *Endpoint) signer() (ssh.Signer, error) {
	if e.PrivateKeyPassword != nil {
		return ssh.ParsePrivateKeyWithPassphrase([]byte(*e.PrivateKey), []byte(*e.PrivateKeyPassword))
	}
	return ssh.ParsePrivateKey([]byte(*e.PrivateKey))
}

// patiently repeats attempt, with growing pauses, until it succeeds or has
// failed more often than limit. The first failure does not count, so a limit of
// 1 is two attempts; 0 is one.
func patiently[T any](ctx context.Context, what string, limit int, attempt func() (T, error)) (T, error) {
	var made T
	shown := "inf"
	if limit != unlimited {
		shown = strconv.Itoa(limit)
	}
	done, _, err := retry.Until(ctx, retry.Acceptor{
		Accept: func(try int, _ time.Duration) (bool, any, error) {
			var failure error
			if made, failure = attempt(); failure == nil {
				return true, nil, nil
			}
			if limit > unlimited && try+1 > limit {
				return true, nil, fmt.Errorf("after %d failed attempts: %w", try, failure)
			}
			p.GetLogger(ctx).InfoStatusf("%s %d/%s failed: retrying", what, try+1, shown)
			return false, nil, nil
		},
	})
	if err == nil && !done {
		err = ctx.Err()
	}
	return made, err
}

// dial connects and logs in, through the proxy if there is one.
func (c *Connection) dial(ctx context.Context) (*ssh.Client, error) {
	config, err := c.clientConfig()
	if err != nil {
		return nil, err
	}
	if c.Proxy == nil {
		return patiently(ctx, "Dial", c.errorLimit(), func() (*ssh.Client, error) {
			return ssh.Dial("tcp", c.address(), config)
		})
	}
	client, err := c.dialThroughProxy(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	return client, nil
}

func (c *Connection) dialThroughProxy(ctx context.Context, config *ssh.ClientConfig) (*ssh.Client, error) {
	proxyConfig, err := c.Proxy.clientConfig()
	if err != nil {
		return nil, err
	}
	proxy, err := patiently(ctx, "Dial proxy", c.Proxy.errorLimit(), func() (*ssh.Client, error) {
		return ssh.Dial("tcp", c.Proxy.address(), proxyConfig)
	})
	if err != nil {
		return nil, err
	}
	tunnel, err := patiently(ctx, "Dial from proxy", c.errorLimit(), func() (net.Conn, error) {
		return proxy.Dial("tcp", c.address())
	})
	if err != nil {
		return nil, err
	}
	return patiently(ctx, "Dial", c.errorLimit(), func() (*ssh.Client, error) {
		connection, channels, requests, err := ssh.NewClientConn(tunnel, c.address(), config)
		if err != nil {
			return nil, err
		}
		return ssh.NewClient(connection, channels, requests), nil
	})
}
