// Apache's Go client, steered line by line.
//
// Each line of standard input is a command: a JSON object whose "do" names it and whose other
// fields are its arguments. Each is answered by one line of standard output, {"answer": …} or
// {"error": "…"}, before the next is read. Clients live under the name that the command that
// started them gave, until "stop" or the end of input. The name server is the only argument of
// the program; the client's own log goes to standard error.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const patience = 20 * time.Second

// client is whatever was started under a name.
type client interface{ Shutdown() error }

// session is the name server to talk to and everything that was started. Something in `arrivals`
// means that a consumer has got more since somebody last looked.
type session struct {
	nameServers primitive.NamesrvAddr
	clients     map[string]client
	arrivals    chan struct{}
}

type action func(*session, json.RawMessage) (any, error)

var actions = map[string]action{
	"produce":   with(startProducer),
	"send":      with(send),
	"consume":   with(startPush),
	"await":     with(await),
	"settle":    with(settle),
	"subscribe": with(startPull),
	"pull":      with(pull),
	"poll":      with(poll),
	"create":    with(createTopic),
	"delete":    with(deleteTopic),
	"topics":    with(listTopics),
	"queues":    with(listQueues),
	"groups":    with(listGroups),
	"stop":      with(stop),
}

func main() {
	rlog.SetLogLevel("warn")
	s := &session{primitive.NamesrvAddr{os.Args[1]}, map[string]client{}, make(chan struct{}, 1)}
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 64<<20)
	output := json.NewEncoder(os.Stdout)
	for input.Scan() {
		answer, err := s.perform(input.Bytes())
		line := map[string]any{"answer": answer}
		if err != nil {
			line = map[string]any{"error": err.Error()}
		}
		if output.Encode(line) != nil {
			return
		}
	}
	for _, client := range s.clients {
		client.Shutdown()
	}
}

func (s *session) perform(line []byte) (any, error) {
	var command struct{ Do string }
	if err := json.Unmarshal(line, &command); err != nil {
		return nil, err
	}
	act, known := actions[command.Do]
	if !known {
		return nil, fmt.Errorf("no such command: %q", command.Do)
	}
	return act(s, line)
}

// with reads the fields of a command into the arguments of the function that carries it out.
func with[A any](act func(*session, A) (any, error)) action {
	return func(s *session, line json.RawMessage) (any, error) {
		var arguments A
		if err := json.Unmarshal(line, &arguments); err != nil {
			return nil, err
		}
		return act(s, arguments)
	}
}

// find is the client of that name, if it is of that kind.
func find[C client](s *session, name string) (C, error) {
	found, ok := s.clients[name].(C)
	if !ok {
		return found, fmt.Errorf("no such %T: %q", found, name)
	}
	return found, nil
}

func stop(s *session, a struct{ Name string }) (any, error) {
	found, err := find[client](s, a.Name)
	if err != nil {
		return nil, err
	}
	delete(s.clients, a.Name)
	return nil, found.Shutdown()
}
